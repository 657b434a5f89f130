"""The record of a forward: its calls of modules and functions, and the values between them, from one or more runs."""
