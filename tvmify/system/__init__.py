"""The operating system: forks, signals, full disks, files of other users, the C++ compiler."""
