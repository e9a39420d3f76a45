"""The shipped variants: one YAML file each, the file stem is its name."""
