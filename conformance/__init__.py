"""What runs, and where: operators, architectures and random programs, compared with eager."""
