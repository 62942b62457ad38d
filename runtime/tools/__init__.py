"""Commands that need torch, a GPU or a compiler: report, analysis, attest, tune, baselines, bench."""
