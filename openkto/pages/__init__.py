"""Pages that a person looks at, made from the files that a run leaves: each is one HTML file without external links."""
