"""Many ranks: how they are laid out, what they send, how long that takes, which layout is best."""
