"""From files of labelled rows to tokens: readers, formats, tokenisation, truncation, cache and the dataset.

Importing this package imports nothing heavy; take `UnpairedPreferenceDataset` from `openkto.data.dataset`.
"""
