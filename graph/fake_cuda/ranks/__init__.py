"""One rank of a job on GPUs that are not there: process groups of any backend, their collectives, what others say."""
