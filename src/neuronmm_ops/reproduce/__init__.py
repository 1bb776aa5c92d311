"""The papers' tables from one TOML file: accuracy, times and gamma, resumable at each result."""
