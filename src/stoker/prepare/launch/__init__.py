"""Launchers of numbered tasks: processes here, a Slurm job array, Ray, pods.

A task is a number. Whoever runs it calls `entry(folder, stage, number)`; the task writes what it makes
into the folder and its completion marker into the ledger. Running a finished task again does nothing,
so any launcher may run any task any number of times, on any machine that sees the folder.
"""
