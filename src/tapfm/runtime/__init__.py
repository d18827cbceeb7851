"""What every long job shares: atomic files, locks, worker processes, progress, interrupts, seeds, devices."""
