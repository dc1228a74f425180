"""`python -m sp_bench` is `sp-bench`."""

from sp_bench.cli import main

main()
