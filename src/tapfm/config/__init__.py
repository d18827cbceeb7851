"""Settings: RUN.toml, STUDY.toml, and the recipes that provide their defaults."""
