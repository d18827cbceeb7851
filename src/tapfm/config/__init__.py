"""Settings: RUN.toml, STUDY.toml and the recipes behind them."""
