/* A stack of its own for every thread of a block, and the switch between two of them. HOST_UCONTEXT: as on other processors. */
#ifndef PTX_FIBER
#define PTX_FIBER

#include <stdint.h>

#if defined(__x86_64__) && !defined(HOST_UCONTEXT)

/* host_switch(&here, there): what the callee must keep goes on the stack, the stack pointer to `here`; then the same backwards. */
__asm__(".text\n.p2align 4\nhost_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\n"
        "pop %rcx\njmp *%rcx\n");
enum { RETURN_WORD = 6 };

#elif defined(__aarch64__) && !defined(HOST_UCONTEXT)

__asm__(".text\n.p2align 4\nhost_switch:\n"
        "sub sp, sp, #160\n"
        "stp x30, x29, [sp]\nstp x19, x20, [sp, #16]\nstp x21, x22, [sp, #32]\nstp x23, x24, [sp, #48]\n"
        "stp x25, x26, [sp, #64]\nstp x27, x28, [sp, #80]\nstp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\n"
        "stp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
        "mov x2, sp\nstr x2, [x0]\nmov sp, x1\n"
        "ldp x30, x29, [sp]\nldp x19, x20, [sp, #16]\nldp x21, x22, [sp, #32]\nldp x23, x24, [sp, #48]\n"
        "ldp x25, x26, [sp, #64]\nldp x27, x28, [sp, #80]\nldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\n"
        "ldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
        "add sp, sp, #160\nbr x30\n");
enum { RETURN_WORD = 0 };

#endif

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(HOST_UCONTEXT)

typedef void *Fiber;

void host_switch(Fiber *here, Fiber there) __asm__("host_switch");

/* Makes a fiber that starts with `entry` on the stack `low` ... `low + bytes`. `entry` never returns. */
static void fiber_start(Fiber *fiber, char *low, long bytes, void (*entry)(void)) {
    uintptr_t *stack = (uintptr_t *)((uintptr_t)(low + bytes) & ~(uintptr_t)63) - 24;
    for (int i = 0; i < 24; i++)
        stack[i] = 0;
    stack[RETURN_WORD] = (uintptr_t)entry;
    *fiber = stack;
}

static inline void fiber_switch(Fiber *here, Fiber *there) { host_switch(here, *there); }

#else

#include <ucontext.h>

typedef ucontext_t Fiber;

static void fiber_start(Fiber *fiber, char *low, long bytes, void (*entry)(void)) {
    getcontext(fiber);
    fiber->uc_stack.ss_sp = low, fiber->uc_stack.ss_size = bytes, fiber->uc_link = 0;
    makecontext(fiber, entry, 0);
}

static inline void fiber_switch(Fiber *here, Fiber *there) { swapcontext(here, there); }

#endif

#endif
