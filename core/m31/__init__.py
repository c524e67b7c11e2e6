"""m31: hardware-abstracted runtime for MiniMax-M3.1-Flash."""
