import os,subprocess,signal,time,sys
# a step with a descendant in a session of its own, and one that ignores SIGTERM
p=subprocess.Popen(["python3","drive.py","steps.py","[Step('t','setsid sleep 41.5 & (trap \"\" TERM; sleep 42.5 & wait) & wait')]","logs7"],stdout=subprocess.DEVNULL)
time.sleep(1.2); p.send_signal(signal.SIGINT); p.wait(20); time.sleep(.5)
os.system("pgrep -af '^sleep 4[12].5'; for x in $(pgrep -f '^sleep 4[12].5'); do kill -9 $x; done")
