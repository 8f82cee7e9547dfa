import multiprocessing as mp, os, sys
sys.path.insert(0,"/tmp/review")
def f(): pass
if __name__=="__main__":
    if len(sys.argv)>1:
        import own_fork_server; own_fork_server.begin()
    c=mp.get_context("forkserver")
    p=c.Process(target=f);p.start();p.join();print("first",p.exitcode,flush=True)
    pid=os.fork()
    if pid==0:
        try:
            q=c.Process(target=f);q.start();q.join();print("child",q.exitcode,flush=True)
        except BaseException as e: print("child",type(e),e,flush=True)
        os._exit(0)
    os.waitpid(pid,0)
    import multiprocessing.forkserver as s
    os.kill(s._forkserver._forkserver_pid,9); import time; time.sleep(.3)
    p=c.Process(target=f);p.start();p.join();print("again",p.exitcode, len(os.listdir("/proc/self/fd")),flush=True)
    for i in range(3):
        os.kill(s._forkserver._forkserver_pid,9); time.sleep(.3)
        p=c.Process(target=f);p.start();p.join();print("again",p.exitcode, len(os.listdir("/proc/self/fd")),flush=True)
