"""What needs all rows at once: numbers and keys on disk, a bounded part of them in memory."""
