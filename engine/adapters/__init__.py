"""Adapters (LoRA, Hu et al. 2021): beside the weights, some of them in slots on the device."""
