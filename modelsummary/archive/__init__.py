"""Archives of torch: exported programs (``.pt2``) and TorchScript (``.pt``). ``modelsummary.load`` reads them."""
