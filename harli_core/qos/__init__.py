"""Quality of service at the decode step: residuals, guard, split choice, pacing and the memory that a job may hold."""
