"""Batch assembly from chunks: token windows, padded or packed documents, WebDataset samples."""
