"""The executions of operators: on shapes or for real."""
