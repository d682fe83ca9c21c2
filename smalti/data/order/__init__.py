"""The order of training: position -> (source, epoch, sequence), as arithmetic."""
