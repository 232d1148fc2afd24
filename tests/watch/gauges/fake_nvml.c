/* A libnvidia-ml.so.1 that replays rows of a recording: one card, the next row at each reading of its power.
   FAKE_NVML names a file of lines "util mem_util power_w temp_c sm_mhz event_reasons fb_used sm_util tensor_util".
   What it leaves out (energy, violations, NVLink, XIDs) is what an old driver does not know either. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, ROWS = 4096 };
static double rows[ROWS][9];
static int count, now = -1;

static double *row(void) { return rows[now < 0 ? 0 : now < count ? now : count - 1]; }

int nvmlInitWithFlags(unsigned flags) {
  FILE *file = fopen(getenv("FAKE_NVML"), "r");
  if (!file) return 9;
  for (double *r = rows[0]; count < ROWS; r = rows[++count])
    if (fscanf(file, "%lf %lf %lf %lf %lf %lf %lf %lf %lf", r, r + 1, r + 2, r + 3, r + 4, r + 5, r + 6, r + 7,
               r + 8) != 9)
      break;
  return fclose(file), OK;
}
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetCount_v2(unsigned *n) { return *n = 1, OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { return *handle = rows, OK; }
int nvmlDeviceGetName(void *card, char *name, unsigned size) { return strncpy(name, "Fake H200", size), OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { return strncpy(text, "580.0", size), OK; }
int nvmlDeviceGetEnforcedPowerLimit(void *card, unsigned *mw) { return *mw = 700000, OK; }
int nvmlDeviceGetMemoryInfo(void *card, unsigned long long *m) {
  return m[0] = 150754820096ull, m[2] = row()[6], m[1] = m[0] - m[2], OK;
}
int nvmlDeviceGetUtilizationRates(void *card, unsigned *u) { return u[0] = row()[0], u[1] = row()[1], OK; }
int nvmlDeviceGetPowerUsage(void *card, unsigned *mw) { return now++, *mw = row()[2] * 1000, OK; }
int nvmlDeviceGetTemperature(void *card, unsigned sensor, unsigned *c) { return *c = row()[3], OK; }
int nvmlDeviceGetClockInfo(void *card, unsigned clock, unsigned *mhz) {
  return clock == 1 ? (*mhz = row()[4], OK) : NOT_SUPPORTED;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *card, unsigned long long *bits) { return *bits = row()[5], OK; }

int nvmlGpmQueryDeviceSupport(void *card, unsigned *support) { return support[1] = 1, OK; }
int nvmlGpmSampleAlloc(void **sample) { return *sample = rows, OK; }
int nvmlGpmSampleFree(void *sample) { return OK; }
int nvmlGpmSampleGet(void *card, void *sample) { return OK; }
struct metric { unsigned id, result; double value; char *texts[3]; };
int nvmlGpmMetricsGet(char *asked) {
  struct metric *metrics = (struct metric *)(asked + 24);
  for (unsigned i = 0; i < ((unsigned *)asked)[1]; i++) {
    metrics[i].result = metrics[i].id == 2 || metrics[i].id == 5 ? OK : NOT_SUPPORTED;
    metrics[i].value = metrics[i].id == 2 ? row()[7] : row()[8];
  }
  return OK;
}
