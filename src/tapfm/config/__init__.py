"""Settings: RUN.toml, STUDY.toml, and the recipes with defaults for RUN.toml."""
