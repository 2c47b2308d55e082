"""What is worth knowing of rows before a run: one pass over them, and what is found in what it kept."""
