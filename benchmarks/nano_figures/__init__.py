"""What `benchmarks/nano.py` measures and shows: one module per question, results as plain JSON."""
