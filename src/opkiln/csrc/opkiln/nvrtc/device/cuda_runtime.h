// For host code alone: NVRTC compiles none.
#pragma once
