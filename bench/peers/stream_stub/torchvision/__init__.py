"""Stand-in for torchvision: see pyproject.toml beside."""
