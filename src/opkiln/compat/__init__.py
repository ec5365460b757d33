"""Other systems' interfaces over opkiln's: ``torch.utils.cpp_extension``, DeepSpeed's builders."""
