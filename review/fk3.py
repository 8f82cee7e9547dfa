import multiprocessing as mp, os, sys, time
sys.path.insert(0,"/tmp/review")
def f(): pass
if __name__=="__main__":
    pass
    c=mp.get_context("forkserver"); p=c.Process(target=f);p.start();p.join()
    import multiprocessing.forkserver as s
    print(s._forkserver._forkserver_pid,flush=True)
    if os.fork()==0:
        time.sleep(6); os._exit(0)
    os.kill(os.getpid(),9)
