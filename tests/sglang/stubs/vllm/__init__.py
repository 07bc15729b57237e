"""Stands in for vLLM, whose rotary embedding SGLang imports on a CPU and never calls with torch's own attention."""
