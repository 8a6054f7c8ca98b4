"""Studies: many strategies side by side, from presets or TOML files, run one after another and resumable."""
