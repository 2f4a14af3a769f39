"""What `octavo bench` and the scripts in benchmarks/ measure with: workloads, timing, and the machine's limits."""
