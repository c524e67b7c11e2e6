"""Quantisation-aware training of models of the architecture (MODEL.md §3.6).

What the served model computes is computed here with gradients: the same encoders for weights, activations and pages.
"""
