"""Training of a DSpark draft head (MODEL.md chapter 5) on a target that stays as it is served."""
