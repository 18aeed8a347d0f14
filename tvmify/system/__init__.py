"""What the operating system does to a process: forks, signals, full disks, files of others."""
