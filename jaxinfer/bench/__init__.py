"""Benchmarks: what is measured (workloads), against whom (peers), how (measure), how it is shown (report).

`python -m jaxinfer bench` runs them. They check every result before timing it; tests never look at times.
"""
