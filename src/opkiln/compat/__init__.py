"""opkiln behind other systems' interfaces: ``torch.utils.cpp_extension``, DeepSpeed's builders."""
