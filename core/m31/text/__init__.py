"""Tokenizer, incremental detokenizer and chat template of a checkpoint (MODEL.md chapter 7)."""
