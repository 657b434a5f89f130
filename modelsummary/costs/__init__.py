"""What work costs: formulas of operators, bytes of tensors, devices and rooflines."""
