"""What every framework needs between itself and the core: engine threads, sharing, refusals."""
