#include "first.h"

extern "C" const char* where() { return kFile; }
