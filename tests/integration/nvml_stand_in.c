/* libnvidia-ml.so.1 with two cards, as far as `stoker doctor` asks. The second runs hot on half its lanes, with one
 * NVLink down; what is not here is answered "not supported" or not found, as by an older driver. */
#include <stdio.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };
typedef unsigned int u32;
typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
static int cards[2] = {0, 1};

int nvmlInitWithFlags(u32 flags) { return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return "said the stand-in"; }
int nvmlSystemGetDriverVersion(char *text, u32 size) { return snprintf(text, size, "580.159.03"), OK; }
int nvmlDeviceGetCount_v2(u32 *count) { return *count = 2, OK; }
int nvmlDeviceGetHandleByIndex_v2(u32 index, int **card) { return *card = &cards[index], OK; }
int nvmlDeviceGetName(int *card, char *text, u32 size) { return snprintf(text, size, "NVIDIA H200"), OK; }
int nvmlDeviceGetPciInfo_v3(int *card, Pci *pci)
{
    memset(pci, 0, sizeof *pci);
    return snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", 0x1A + *card), OK;
}
int nvmlDeviceGetPersistenceMode(int *card, u32 *mode) { return *mode = 1, OK; }
int nvmlDeviceGetEccMode(int *card, u32 *now, u32 *pending) { return *now = *pending = 1, OK; }
int nvmlDeviceGetTotalEccErrors(int *card, u32 type, u32 counter, unsigned long long *count)
{
    return *count = type == 1 && counter == 0 ? 0 : 99, OK; /* uncorrected, since the driver was loaded */
}
int nvmlDeviceGetRemappedRows(int *card, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed)
{
    return *corrected = *uncorrected = *pending = *failed = 0, OK;
}
int nvmlDeviceGetPowerManagementLimit(int *card, u32 *milliwatts) { return *milliwatts = 700000, OK; }
int nvmlDeviceGetPowerManagementDefaultLimit(int *card, u32 *milliwatts) { return *milliwatts = 700000, OK; }
int nvmlDeviceGetApplicationsClock(int *card, u32 clock, u32 *mhz) { return NOT_SUPPORTED; }
int nvmlDeviceGetCurrentClocksThrottleReasons(int *card, unsigned long long *reasons)
{
    return *reasons = *card ? 0x44 : 0x04, OK; /* both are power-capped, which is healthy */
}
int nvmlDeviceGetPerformanceState(int *card, u32 *state) { return *state = 0, OK; }
int nvmlDeviceGetCurrPcieLinkGeneration(int *card, u32 *gen) { return *gen = 5, OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(int *card, u32 *gen) { return *gen = 5, OK; }
int nvmlDeviceGetCurrPcieLinkWidth(int *card, u32 *width) { return *width = *card ? 8 : 16, OK; }
int nvmlDeviceGetMaxPcieLinkWidth(int *card, u32 *width) { return *width = 16, OK; }
int nvmlDeviceGetNvLinkState(int *card, u32 link, u32 *up)
{
    if (link >= 4)
        return INVALID_ARGUMENT;
    return *up = !(*card && link == 3), OK;
}
int nvmlDeviceGetP2PStatus(int *one, int *other, u32 kind, u32 *status) { return *status = 0, OK; }
