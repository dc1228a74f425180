"""Slurm: a sweep as batch jobs."""
