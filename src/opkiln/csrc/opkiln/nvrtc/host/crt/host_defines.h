// In place of CUDA's header, which torch's wheels lack: prelude.h has what it defines.
