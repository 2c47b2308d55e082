"""The programs: each a `main(argv)` over the library, behind `cli/*.py` and `openkto <command>`."""
