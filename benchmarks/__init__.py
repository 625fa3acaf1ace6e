"""Speed and memory of the parts that must scale. Run all with ``python -m benchmarks``; nothing here is a test."""
