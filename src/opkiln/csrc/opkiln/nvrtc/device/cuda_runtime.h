// Empty: host code needs this header, and NVRTC compiles none.
#pragma once
