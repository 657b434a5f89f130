"""Files of torch: exported programs (``.pt2``) and TorchScript."""
