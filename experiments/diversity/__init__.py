"""The experiments of Yin et al. (arXiv 1706.05699): how far do larger batches go, and what did the bound say?

`variants`: what is compared; `place`: how a run is changed and measured; `search`: the runs, each batch size with the
learning rate that suits it best; `saturation`: from runs to numbers; `charts` and `report`: what people look at.
"""
