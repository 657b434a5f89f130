"""The cost of work: formulas of operators, bytes of tensors, kernels, devices and rooflines."""
