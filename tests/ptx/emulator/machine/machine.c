/* The machine, for a kernel that is linked to it. */
#include "machine.h"

Machine machine;
